"""attrax: which training examples made the model do that?

    train = attrax.live(model, train_batches)
    query = attrax.live(model, query_batches)
    scores = attrax.ekfac(train, query)          # [N, Q], higher = more helpful
    scores.top(10, query=0)

The library has three rooms: `attrax.core` (values and pure functions), `attrax.methods` (one paper a file) and
`attrax.frontends` (models, training loops, files).  This module is the shop window: everything most programs need.
"""

from attrax.core import Block as Block
from attrax.core import Blocks as Blocks
from attrax.core import Clip as Clip
from attrax.core import Directions as Directions
from attrax.core import Examples as Examples
from attrax.core import GradTree as GradTree
from attrax.core import Grass as Grass
from attrax.core import Hardware as Hardware
from attrax.core import Mask as Mask
from attrax.core import Optimizer as Optimizer
from attrax.core import Projection as Projection
from attrax.core import Recorded as Recorded
from attrax.core import Scores as Scores
from attrax.core import Source as Source
from attrax.core import Step as Step
from attrax.core import Trajectory as Trajectory
from attrax.core import chain as chain
from attrax.core import collect as collect
from attrax.core import content_ids as content_ids
from attrax.core import fold as fold
from attrax.core import projected as projected
from attrax.core import selected as selected
from attrax.core import stored as stored
from attrax.core import targeted as targeted
from attrax.core import transformed as transformed
from attrax.frontends import BackwardEvent as BackwardEvent
from attrax.frontends import Capture as Capture
from attrax.frontends import Coverage as Coverage
from attrax.frontends import Decision as Decision
from attrax.frontends import Recipe as Recipe
from attrax.frontends import StepEvent as StepEvent
from attrax.frontends import Store as Store
from attrax.frontends import capture as capture
from attrax.frontends import causal_lm as causal_lm
from attrax.frontends import classification as classification
from attrax.frontends import decay_groups as decay_groups
from attrax.frontends import documents as documents
from attrax.frontends import forward_scores as forward_scores
from attrax.frontends import functional as functional
from attrax.frontends import gather_scores as gather_scores
from attrax.frontends import live as live
from attrax.frontends import load_state, save_state
from attrax.frontends import measure_hardware as measure_hardware
from attrax.frontends import open_store as open_store
from attrax.frontends import open_trajectory as open_trajectory
from attrax.frontends import packed as packed
from attrax.frontends import per_token as per_token
from attrax.frontends import probe as probe
from attrax.frontends import processes as processes
from attrax.frontends import query_losses as query_losses
from attrax.frontends import read_optimizer as read_optimizer
from attrax.frontends import read_saved_optimizer as read_saved_optimizer
from attrax.frontends import read_scores as read_scores
from attrax.frontends import record as record
from attrax.frontends import removal_effects as removal_effects
from attrax.frontends import replay as replay
from attrax.frontends import restore as restore
from attrax.frontends import select as select
from attrax.frontends import selections as selections
from attrax.frontends import stacked as stacked
from attrax.frontends import store as store
from attrax.frontends import sum_scores as sum_scores
from attrax.frontends import to_pandas as to_pandas
from attrax.frontends import trainer_callback as trainer_callback
from attrax.frontends import trainer_options as trainer_options
from attrax.frontends import write_scores as write_scores
from attrax.methods import Curvature as Curvature
from attrax.methods import Less as Less
from attrax.methods import agreement as agreement
from attrax.methods import auroc as auroc
from attrax.methods import average_ranks as average_ranks
from attrax.methods import bootstrap as bootstrap
from attrax.methods import drop_fraction as drop_fraction
from attrax.methods import drop_negative as drop_negative
from attrax.methods import dvemb as dvemb
from attrax.methods import dvemb_embeddings as dvemb_embeddings
from attrax.methods import ekfac as ekfac
from attrax.methods import fit_ekfac as fit_ekfac
from attrax.methods import fit_kfac as fit_kfac
from attrax.methods import fit_logra as fit_logra
from attrax.methods import gradcos as gradcos
from attrax.methods import graddot as graddot
from attrax.methods import greats as greats
from attrax.methods import group_scores as group_scores
from attrax.methods import influence as influence
from attrax.methods import keep_top as keep_top
from attrax.methods import kfac as kfac
from attrax.methods import lds as lds
from attrax.methods import less as less
from attrax.methods import less_checkpoints as less_checkpoints
from attrax.methods import logra as logra
from attrax.methods import magic as magic
from attrax.methods import preconditioned as preconditioned
from attrax.methods import random_subsets as random_subsets
from attrax.methods import recall_at as recall_at
from attrax.methods import score_dvemb as score_dvemb
from attrax.methods import score_logra as score_logra
from attrax.methods import self_influence as self_influence
from attrax.methods import shapley as shapley
from attrax.methods import spearman as spearman
from attrax.methods import tracin as tracin
from attrax.methods import tracin_checkpoints as tracin_checkpoints
from attrax.methods import trajectory_influence as trajectory_influence

__version__ = "0.1.0"


def save_curvature(curvature: Curvature, path: str) -> None:
    """Write a fitted curvature to one HDF5 file; see `load_curvature`."""
    save_state(curvature, path)


def load_curvature(path: str) -> Curvature:
    """Read a curvature written by `save_curvature`: score again, with any damping, without refitting."""
    return load_state(path, Curvature)
