"""The definitions of a script, run once more without its effects."""
import os
import sys
import textwrap

import pytest
from mmengine.config import Config
from mmengine.runner import Runner

from mmrepro.selfcheck import recipe, script


@pytest.fixture
def defined(tmp_path, monkeypatch):
    """Return a function: text of a script, names to define -> what it has defined."""
    monkeypatch.setitem(sys.modules, '__main__', sys.modules['__main__'])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(text, *names):
        path = tmp_path / 'trains.py'
        path.write_text(textwrap.dedent(text))
        script.run_definitions(str(path), names)
        return vars(sys.modules['__main__'])
    return run


@pytest.mark.parametrize('effect', [
    "os.mkdir('made')", "os.makedirs('made')", "open('made', 'w')", "os.open('made', os.O_CREAT)",
    "os.symlink('trains.py', 'made')", "os.system('touch made')"])
def test_a_statement_with_an_effect_is_left_out(defined, effect):
    found = defined(f"""
        import os
        {effect}
        class Mine: pass
        """, 'Mine')
    assert 'Mine' in found and not os.path.exists('made')


def test_folders_that_exist_and_the_null_device_are_no_effect(defined):
    os.mkdir('there')
    found = defined("""
        import os
        os.makedirs('there', exist_ok=True)
        silent = open(os.devnull, 'w')
        class Mine: pass
        """, 'Mine')
    assert 'Mine' in found and 'silent' in found


@pytest.mark.parametrize('text', ['import a_helper', '''try:
    import a_helper
except ImportError:
    pass'''])
def test_a_module_is_imported_that_has_no_bytecode(defined, tmp_path, monkeypatch, text):
    """As in a folder that this user may not write to."""
    monkeypatch.setattr(sys, 'dont_write_bytecode', False)
    monkeypatch.delitem(sys.modules, 'a_helper', raising=False)
    (tmp_path / 'a_helper.py').write_text('class Base: pass')
    assert 'Mine' in defined(f'{text}\nclass Mine(a_helper.Base): pass', 'Mine')


def test_a_package_may_make_a_folder_for_its_cache(defined, tmp_path):
    (tmp_path / 'caching.py').write_text("import os\nos.makedirs('cache', exist_ok=True)")
    found = defined('import caching\nclass Mine: pass', 'Mine')
    assert 'Mine' in found and 'caching' in found


def test_classes_and_functions_that_settings_name_are_defined_once_more():
    """As in ``model=dict(type=Small)``: no registry has them."""
    def function():
        pass

    class Small:
        pass

    for thing in (Small, function):
        thing.__module__, thing.__qualname__ = '__main__', thing.__name__
    settings = dict(model=dict(type=Small), cfg=Config(dict(parts=[dict(type=function)])))
    assert recipe.recipe_of(Runner, settings, {}).names == ['Small', 'function']


def test_the_file_of_a_run_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['train.py', '--api-key', 'harmless', 's3://me:harmless@host'])
    made = recipe.recipe_of(Runner, dict(cfg=Config(dict(model=dict(type='Small')))), {})
    assert made.arguments == sys.argv  # the witness has what the run had
    path = tmp_path / recipe.FILE
    recipe.write(str(path), made, 'config.py', [], 0)
    assert '"train.py"' in path.read_text() and 'harmless' not in path.read_text()
