"""Attribution methods: one paper (or family) a file, plain functions of sources.

Every method returns `Scores` [N, Q], train rows by query columns, **higher = more helpful**: the first-order
decrease of the query's loss when the train example is up-weighted.
"""

from attrax.methods.along import Stepped as Stepped
from attrax.methods.dvemb import dvemb as dvemb
from attrax.methods.embeddings import dvemb_embeddings as dvemb_embeddings
from attrax.methods.embeddings import score_dvemb as score_dvemb
from attrax.methods.evaluation import above_floor as above_floor
from attrax.methods.evaluation import agreement as agreement
from attrax.methods.evaluation import bootstrap as bootstrap
from attrax.methods.evaluation import linearity as linearity
from attrax.methods.graddot import gradcos as gradcos
from attrax.methods.graddot import graddot as graddot
from attrax.methods.groups import group_scores as group_scores
from attrax.methods.groups import lds as lds
from attrax.methods.groups import random_subsets as random_subsets
from attrax.methods.kfac import Curvature as Curvature
from attrax.methods.kfac import ekfac as ekfac
from attrax.methods.kfac import fit_ekfac as fit_ekfac
from attrax.methods.kfac import fit_kfac as fit_kfac
from attrax.methods.kfac import influence as influence
from attrax.methods.kfac import kfac as kfac
from attrax.methods.kfac import preconditioned as preconditioned
from attrax.methods.less import Less as Less
from attrax.methods.less import less as less
from attrax.methods.less import less_checkpoints as less_checkpoints
from attrax.methods.logra import ProjectedFisher as ProjectedFisher
from attrax.methods.logra import fit_logra as fit_logra
from attrax.methods.logra import logra as logra
from attrax.methods.logra import score_logra as score_logra
from attrax.methods.magic import magic as magic
from attrax.methods.metrics import auroc as auroc
from attrax.methods.metrics import average_ranks as average_ranks
from attrax.methods.metrics import descending_rank as descending_rank
from attrax.methods.metrics import recall_at as recall_at
from attrax.methods.metrics import spearman as spearman
from attrax.methods.pairwise import pairwise as pairwise
from attrax.methods.selection import drop_fraction as drop_fraction
from attrax.methods.selection import drop_negative as drop_negative
from attrax.methods.selection import greats as greats
from attrax.methods.selection import keep_top as keep_top
from attrax.methods.self_influence import self_influence as self_influence
from attrax.methods.shapley import shapley as shapley
from attrax.methods.tracin import tracin as tracin
from attrax.methods.tracin import tracin_checkpoints as tracin_checkpoints
from attrax.methods.trajectory_influence import trajectory_influence as trajectory_influence
