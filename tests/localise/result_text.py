"""What a search says, for the tests."""


def text_of(result):
    return '\n'.join([result.sentence(), *result.notes, *map(' '.join, result.rows())])
