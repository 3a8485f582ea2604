"""What would make two runs of a config differ, without running it. One row per rule."""
from .auditing import audit, exit_code, load
from .findings import CHANGES, HINT, MAY, AuditError, AuditFinding, AuditRule
from .rules import RULES
from .subject import Subject

__all__ = ['CHANGES', 'HINT', 'MAY', 'RULES', 'AuditError', 'AuditFinding', 'AuditRule',
           'Subject', 'audit', 'exit_code', 'load']
