"""Each reason why a match falls short, in words: what happened, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """``why`` goes on after "It stops there because"; ``advice`` is a sentence of its own."""

    why: str
    advice: str


# By kvstore.api.MissReason.
REASONS: Mapping[str, Reason] = {
    "none": Reason("all that can be hit is: some token is always computed", "Nothing is to be done."),
    "shorter_than_block": Reason(
        "the prompt is shorter than a block, and such content is never cached", "Nothing is to be done."
    ),
    "never_seen": Reason(
        "the next block is not stored, and no prompt with it was seen lately",
        "Look for what changes in the prompt before that place: --against an earlier prompt shows it. If"
        " another namespace has it, see there.",
    ),
    "not_stored": Reason(
        "the next block was seen lately, and no worker came to store it",
        "Look at that worker: its store queue drops blocks when its pool is needed, and a prompt that is"
        " asked for again at once is not stored yet.",
    ),
    "refused": Reason(
        "the next block was to be stored, and the arena had no room for it",
        "Raise host_bytes, or look why so much is unwritten: a slow disk, or workers that hold slots.",
    ),
    "failed": Reason(
        "storing the next block began and did not end: its worker gave up or died, or the disk failed",
        "Look at the worker's log and at the faults of the status page. The next store of it heals this.",
    ),
    "evicted": Reason(
        "the next block was stored, and left a full disk as least recently used",
        "Raise disk_bytes; latentkv plan says what each size would hit.",
    ),
    "expired": Reason(
        "the next block was stored, and its time to live is over",
        "Raise ttl_seconds or max_age_seconds, or pin the unit.",
    ),
    "deleted": Reason("the next block was stored, and an operator deleted it", "Nothing is to be done."),
    "lost": Reason(
        "the next block was stored, and its bytes came back damaged or not at all",
        "Suspect the disk; see the faults of the status page. The next store of it heals this.",
    ),
    "diverged": Reason(
        "what is stored goes on with other tokens",
        "As it should be for a new question to a known document. If it parts earlier than that, look for"
        " what changes in the prompt: --against an earlier prompt shows it.",
    ),
    "no_unit": Reason(
        "more is stored, but no unit ends there, and a hit is a whole unit",
        "A smaller interval leaves more units; the policy block hits at any block.",
    ),
    "pending": Reason(
        "another worker is storing the next block right now",
        "Ask again when it is done; usually in a moment.",
    ),
    "unavailable": Reason("the daemon did not answer", "Start it, or look at its log."),
    "unknown": Reason(
        "of a reason that this command does not know, for the daemon is newer", "Upgrade this command."
    ),
}

# By kvstore.observer.Departure and kvstore.ghosts.Setback: what became of a block, with when.
FATES: Mapping[str, str] = {
    "capacity": "evicted",
    "expired": "expired",
    "deleted": "deleted",
    "corrupt": "found damaged",
    "lost": "found missing on the disk",
    "refused": "refused by a full arena",
    "given_up": "given up by the worker that stored it",
    "unwritten": "lost from memory while the disk could not be written",
}
