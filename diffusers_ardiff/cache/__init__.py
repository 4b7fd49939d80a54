"""Paged K/V cache: window policy, page allocator, memory plan (integers only) and storage, sessions (tensors)."""

from .allocator import OutOfPagesError, PageAllocator, PageRun, slot_of
from .branch import Branch
from .float8 import FLOAT8, KVScales
from .layout import ForwardSpan, RingGeometry
from .ledger import PageHold, PageLedger
from .manager import KVManager
from .plan import KVShape, MemoryLimitError, MemoryPlan, SideState, plan_memory
from .ring import RingState
from .session import Session
from .storage import KVStorage
from .text import TextKV, TextLayerKV

__all__ = [
    "FLOAT8",
    "Branch",
    "ForwardSpan",
    "KVManager",
    "KVScales",
    "KVShape",
    "KVStorage",
    "MemoryLimitError",
    "MemoryPlan",
    "OutOfPagesError",
    "PageAllocator",
    "PageHold",
    "PageLedger",
    "PageRun",
    "RingGeometry",
    "RingState",
    "Session",
    "SideState",
    "TextKV",
    "TextLayerKV",
    "plan_memory",
    "slot_of",
]
