"""The tree of a reduction, from its description."""
from mmrepro.distributed.reduction_tree import combine_of, finish_of


def written_out(leaves, op):
    """Build the tree from its description: halves of a power of two, the rest from the right."""
    combine, leaves = combine_of(op), list(leaves)

    def whole(part):
        if len(part) == 1:
            return part[0].clone()
        half = len(part) // 2
        return combine(whole(part[:half]), whole(part[half:]))

    parts, rest = [], leaves
    while rest:
        size = 1 << (len(rest).bit_length() - 1)
        parts.append(whole(rest[:size]))
        rest = rest[size:]
    total = parts.pop()
    while parts:
        total = combine(parts.pop(), total)
    return finish_of(op, len(leaves))(total)
