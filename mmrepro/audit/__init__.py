"""What would make two runs of a config differ, without running it. One row per rule."""
from .auditing import audit, findings_of, load
from .findings import CHANGES, HINT, MAY, AuditFinding, AuditRule
from .rules import RULES
from .subject import Subject
