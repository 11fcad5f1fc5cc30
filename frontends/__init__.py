"""Everything stateful: models, training loops, files, data.  They feed sources to methods and write their results."""

from attrax.frontends.capture import Capture as Capture
from attrax.frontends.capture import StepEvent as StepEvent
from attrax.frontends.capture import capture as capture
from attrax.frontends.coverage import Coverage as Coverage
from attrax.frontends.data import batches as batches
from attrax.frontends.data import encode as encode
from attrax.frontends.data import read_examples as read_examples
from attrax.frontends.distributed import gather_scores as gather_scores
from attrax.frontends.distributed import processes as processes
from attrax.frontends.forward import forward_scores as forward_scores
from attrax.frontends.functional import functional as functional
from attrax.frontends.hardware import measure_hardware as measure_hardware
from attrax.frontends.live import live as live
from attrax.frontends.losses import causal_lm as causal_lm
from attrax.frontends.losses import classification as classification
from attrax.frontends.packing import packed as packed
from attrax.frontends.per_token import per_token as per_token
from attrax.frontends.probe import probe as probe
from attrax.frontends.states import load_state as load_state
from attrax.frontends.states import save_state as save_state
from attrax.frontends.store import Store as Store
from attrax.frontends.store import open_store as open_store
from attrax.frontends.store import store as store
from attrax.frontends.tables import read_scores as read_scores
from attrax.frontends.tables import to_pandas as to_pandas
from attrax.frontends.tables import write_scores as write_scores
