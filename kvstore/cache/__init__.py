"""What an engine holds: a scope over shared tiers, the matches it finds and the entries it reads."""

from kvstore.cache.entries import Entries, Stored
from kvstore.cache.match import Match, PinnedPages
from kvstore.cache.scope import Scope
from kvstore.cache.shared import SharedTiers

__all__ = ["Entries", "Match", "PinnedPages", "Scope", "SharedTiers", "Stored"]
