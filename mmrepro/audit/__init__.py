"""Find what would make two runs of a config differ, without a run. One row per rule."""
from .findings import CHANGES, HINT, MAY, AuditFinding, AuditRule
from .rules import RULES, audit, findings_of, load
from .subject import Subject
