"""Walks read containers and proxies of the user's without running their code."""
import weakref
from collections import OrderedDict

import pytest

from mmrepro.distributed.unwrap import nested_items
from mmrepro.objects.walks import items, keys_and_values


class LazyDict(dict):
    def items(self):
        raise RuntimeError('loads files')

    __iter__ = keys = values = __getitem__ = items


class LazyList(list):
    def __iter__(self):
        raise RuntimeError('loads files')

    __getitem__ = __iter__


@pytest.mark.parametrize('content, found', [
    (LazyDict(a=1), [("x['a']", 1)]), (LazyList([2]), [('x[0]', 2)])])
def test_containers_are_read_without_their_methods(content, found):
    assert items(content, 'x') == found
    assert [value for _, value in nested_items('x', content)] == [value for _, value in found]


def test_an_ordered_dict_has_its_own_order():
    cache = OrderedDict(a=1, b=2)
    cache.move_to_end('a')
    assert [key for key, _ in keys_and_values(cache)] == ['b', 'a']


def test_proxies_whose_object_is_gone_are_left_out():
    class Thing:
        pass

    gone = weakref.proxy(Thing())
    assert items([gone, 1], 'x') == [('x[1]', 1)]
    assert [*nested_items('x', [gone, 1])] == [('x.1', 1)]
