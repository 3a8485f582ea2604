"""Code that is read once: a branch is written as a branch."""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'mmrepro'


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1)


def _is_chained(node):
    return isinstance(node, ast.IfExp) and ast.IfExp in map(type, (node.body, node.orelse))


def _is_indexed(node):
    return isinstance(node, ast.Subscript) and isinstance(
        node.value, (ast.List, ast.Tuple, ast.Dict))


def _fault(node):
    if _is_chained(node):
        return 'a conditional expression in another one'
    if _is_indexed(node):
        return 'an indexed literal'
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and any(
            _is_text(text) and not isinstance(number, ast.Constant)
            for text, number in ((node.left, node.right), (node.right, node.left))):
        return 'a text times a flag'
    if len(getattr(node, 'generators', ())) > 2:
        return 'a comprehension over three things'
    return None


@pytest.mark.parametrize('code', ['a if b else c if d else e', '[a, b][c]', "'text' * flag",
                                  '[x for a in b for c in a for x in c]'])
def test_what_has_to_be_read_twice_is_seen(code):
    assert any(map(_fault, ast.walk(ast.parse(code))))


def test_nothing_has_to_be_read_twice():
    faults = [f'{path.relative_to(PACKAGE)}:{node.lineno}: {_fault(node)}'
              for path in sorted(PACKAGE.rglob('*.py')) if '.mim' not in path.parts
              for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))) if _fault(node)]
    assert faults == []


@pytest.mark.parametrize('folder', ['benchmarks', 'dev', 'findings', 'tests', 'tools'])
def test_beside_the_package_a_branch_is_a_branch(folder):
    faults = [f'{path.relative_to(ROOT)}:{node.lineno}: {_fault(node)}'
              for path in sorted((ROOT / folder).rglob('*.py'))
              for node in ast.walk(ast.parse(path.read_text(encoding='utf-8')))
              if _is_chained(node) or _is_indexed(node)]
    assert faults == []
