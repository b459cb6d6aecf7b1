"""The commands as functions: what the command line parses for and a notebook calls. Each does one
job and returns a record."""

from archsearch.pipeline.confirm import LoadRequest, confirm_load, confirm_rank
from archsearch.pipeline.estimate import estimate_drafts
from archsearch.pipeline.export import export_rank
from archsearch.pipeline.in_engine import EngineChoice
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.profile import import_tables, profile_device
from archsearch.pipeline.profile.run import ProfileRequest
from archsearch.pipeline.schedule import schedule_rank
from archsearch.pipeline.search import search
from archsearch.pipeline.session import SearchRequest, SearchSession, check_weights
from archsearch.pipeline.train import train_rank

__all__ = [
    "EngineChoice",
    "LoadRequest",
    "ProfileRequest",
    "SearchRequest",
    "SearchSession",
    "check_weights",
    "choose_latency",
    "confirm_load",
    "confirm_rank",
    "estimate_drafts",
    "export_rank",
    "import_tables",
    "profile_device",
    "schedule_rank",
    "search",
    "train_rank",
]
