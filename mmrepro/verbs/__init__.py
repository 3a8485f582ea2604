"""The verbs that examine trainings, as functions that return a :class:`Report`.

    from mmrepro import verbs
    report = verbs.compare('work_dirs/monday', 'work_dirs/tuesday')
    print(report)             # what the command prints
    report.data['first']      # the same as data
    report.write('comparison', 'compare')
"""
from ..audit.rules import audit
from ..localise.compare_modules import compare_modules
from ..localise.compare_onnx import compare_onnx
from ..localise.search import localise
from ..report.compare import compare
from ..report.report import Figure, Report, Table
from .demo import demo
from .doctor import doctor, operators, upgrade
from .golden import check_goldens, record_goldens
from .replay import export, replay
from .seeds import seeds
from .verify import verify, verify_run

__all__ = ['Figure', 'Report', 'Table', 'audit', 'check_goldens', 'compare', 'compare_modules',
           'compare_onnx', 'demo', 'doctor', 'export', 'localise', 'operators', 'record_goldens',
           'replay', 'seeds', 'upgrade', 'verify', 'verify_run']
