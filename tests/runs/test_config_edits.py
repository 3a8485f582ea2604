"""Changes of configs."""
import pytest
from mmengine.config import Config

from mmrepro.runs.config_edits import import_mmrepro


@pytest.mark.parametrize('given, added, expected', [
    (None, True, ['mmrepro']), (['mine'], True, ['mine', 'mmrepro']),
    (['mmrepro'], False, ['mmrepro']), ('mine.mmrepro', True, ['mine.mmrepro', 'mmrepro'])])
def test_mmrepro_is_imported_once(given, added, expected):
    imports = given and dict(imports=given, allow_failed_imports=True)
    cfg = Config(dict(custom_imports=imports))
    assert import_mmrepro(cfg) is added
    assert cfg.custom_imports['imports'] == expected
