"""Changes of configs."""
import pytest
from mmengine.config import Config

from mmrepro.runs.config_edits import import_mmrepro


@pytest.mark.parametrize('imports, added', [
    (None, True), (dict(imports=['mine'], allow_failed_imports=True), True),
    (dict(imports=['mmrepro']), False)])
def test_mmrepro_is_imported_once(imports, added):
    cfg = Config(dict(custom_imports=imports))
    assert import_mmrepro(cfg) is added
    assert cfg.custom_imports['imports'].count('mmrepro') == 1
