"""What would make two runs of a config differ, without running it. One row per rule."""
from .finding import CHANGES, HINT, MAY, AuditError, Finding, Rule
from .rules import RULES
from .run import audit, exit_code, load
from .subject import Subject

__all__ = ['CHANGES', 'HINT', 'MAY', 'RULES', 'AuditError', 'Finding', 'Rule', 'Subject', 'audit',
           'exit_code', 'load']
