"""What happens during a run."""
from .fingerprint import FingerprintHook
from .operator_guard import OperatorGuardHook
from .preempt import PreemptHook
from .self_check import SelfCheckHook


