"""Objects that are moved to a subclass of their own class."""
import pytest

from mmrepro.util.scoped import extend, stock_class


class Counter:
    def __init__(self):
        self.seen = 0

    def add(self):
        self.seen += 1


def twice(self):
    self._mmrepro_stock.add(self)
    self._mmrepro_stock.add(self)


def test_an_object_keeps_its_attributes_its_name_and_its_own_methods():
    counter, other = Counter(), Counter()
    extend(counter, dict(add=twice))
    counter.add()
    other.add()
    assert (counter.seen, other.seen) == (2, 1) and isinstance(counter, Counter)
    assert type(counter).__qualname__ == 'Counter' and type(counter).__module__ == __name__
    assert stock_class(counter) is stock_class(other) is Counter


def test_an_object_is_moved_once_for_each_name_of_the_stock_class():
    counter = Counter()
    extend(counter, dict(add=twice), prefix='Keyed')
    first = type(counter)
    extend(counter, dict(add=twice), prefix='Again')
    assert type(counter) is first and first.__qualname__ == 'KeyedCounter'
    extend(counter, {}, stock='_mmrepro_recorded')
    assert type(counter)._mmrepro_recorded is first and stock_class(counter) is Counter


def test_an_object_without_a_class_of_python_is_refused():
    with pytest.raises(TypeError):
        extend([], {})
