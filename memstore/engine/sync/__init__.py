"""What processes share beside files and catalog: mutexes and doorbells, in pages that all of them map; and clocks."""

from __future__ import annotations

from memstore.engine.sync.claims import CLAIMED, CLAIMING, CLAIMS, CLAIMS_SIZE, FREE, PUBLISHING, Claim, ClaimTable
from memstore.engine.sync.clocks import boot_clock, boot_id, deadline_after
from memstore.engine.sync.control_page import (
    CONTROL_SIZE,
    GONE_AT,
    OPEN,
    SEALED,
    SEALING,
    SPARE_AT,
    SPARE_END,
    ControlPage,
    FileIdentity,
    check_page,
    new_page,
)
from memstore.engine.sync.doorbell import Doorbell, Watch
from memstore.engine.sync.lock_page import LockPage, is_lock_page, publications_rung, read_notes
from memstore.engine.sync.mutex import Refusal, RobustMutex, describe_thread
from memstore.engine.sync.ring_numbers import RingNumbers
from memstore.engine.sync.seats import INSERTS, SAMPLES, SEATS, Seats
from memstore.engine.sync.shared_page import SharedPage

__all__ = [
    "CLAIMED",
    "CLAIMING",
    "CLAIMS",
    "CLAIMS_SIZE",
    "Claim",
    "ClaimTable",
    "FREE",
    "INSERTS",
    "PUBLISHING",
    "RingNumbers",
    "SAMPLES",
    "SEATS",
    "Seats",
    "CONTROL_SIZE",
    "ControlPage",
    "FileIdentity",
    "GONE_AT",
    "OPEN",
    "SEALED",
    "SEALING",
    "SPARE_AT",
    "SPARE_END",
    "Doorbell",
    "LockPage",
    "Refusal",
    "RobustMutex",
    "SharedPage",
    "Watch",
    "boot_clock",
    "boot_id",
    "check_page",
    "deadline_after",
    "describe_thread",
    "is_lock_page",
    "new_page",
    "publications_rung",
    "read_notes",
]
