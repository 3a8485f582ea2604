"""Changes of configs."""
import pytest
from mmengine.config import Config

from mmrepro.runs.config_edits import add_fingerprints, import_mmrepro


def test_fingerprints_replace_those_of_the_config():
    cfg = Config(dict(custom_hooks=[dict(type='EMAHook'), dict(type='mmrepro.FingerprintHook')]))
    add_fingerprints(cfg, 'module', 2)
    assert cfg.custom_hooks == [dict(type='EMAHook'),
                                dict(type='FingerprintHook', level='module', interval=2)]


@pytest.mark.parametrize('imports, added', [
    (None, True), (dict(imports=['mine'], allow_failed_imports=True), True),
    (dict(imports=['mmrepro']), False)])
def test_mmrepro_is_imported_once(imports, added):
    cfg = Config(dict(custom_imports=imports))
    assert import_mmrepro(cfg) is added
    assert cfg.custom_imports['imports'].count('mmrepro') == 1
