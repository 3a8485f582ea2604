"""Variables of user code get their captured values for a block, and are as they were behind it."""
import functools

from mmrepro.another_process import UserVariables


class Base:
    count, table = 0, {}  # noqa: RUF012

    @classmethod
    def of_class(cls):
        return cls

    @staticmethod
    def static(value):
        return value

    @property
    def three(self):
        return 3

    @functools.lru_cache  # noqa: B019
    def cached(self):
        return object()

    def default(self, kept=[]):  # noqa: B006
        return kept


class Derived(Base):
    pass


class Unreadable:
    def __getattr__(self, name):
        raise RuntimeError(name)


LATER = None


def test_captured_values_are_back_in_the_block_only(monkeypatch):
    thing = Derived()
    variables = UserVariables([thing])
    assert variables.changed() == []
    cached = thing.cached()
    Base.count = 5
    Base.table['key'] = 1
    thing.default().append(2)
    monkeypatch.setitem(globals(), 'LATER', Unreadable())
    monkeypatch.setitem(globals(), 'NEW', [1])
    of_class = dict(vars(Base))
    with variables.as_captured():
        assert (Base.count, Base.table, thing.default(), LATER) == (0, {}, [], None)
        assert 'NEW' not in globals() and thing.cached() is not cached
        assert Derived.of_class() is Derived and Base.static(4) == 4 and thing.three == 3
    assert {name: id(value) for name, value in vars(Base).items()} == {
        name: id(value) for name, value in of_class.items()}
    assert (Base.count, Base.table, thing.default()) == (5, {'key': 1}, [2])
    assert globals()['NEW'] == [1] and thing.cached() is cached and Derived.of_class() is Derived


class Forgets:
    first = 1


def test_a_variable_that_was_deleted_stays_deleted():
    variables = UserVariables([Forgets])
    del Forgets.first
    with variables.as_captured():
        assert Forgets.first == 1
    assert 'first' not in vars(Forgets) and variables.changed()
