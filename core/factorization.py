"""Layer rules: how each layer type's parameters turn (input, output gradient) into leaves.

A user adds a layer type by putting one more `Rule` in front of `RULES`: a pure function and the class, or class name,
that it is for.  Rules are looked up along the module's class hierarchy (Hugging Face defines one RMSNorm a model);
whether a rule really fits is checked against autograd by the front-ends (`verify`).
"""

from collections.abc import Sequence

from torch import nn

from attrax.core.layers import convolution as _convolution
from attrax.core.layers import elementwise as _elementwise
from attrax.core.layers import embedding as _embedding
from attrax.core.layers import experts as _experts
from attrax.core.layers import linear as _linear
from attrax.core.layers import norm as _norm
from attrax.core.layers import rule as _rule
from attrax.core.layers.linear import linear as linear
from attrax.core.layers.rule import Factorize as Factorize
from attrax.core.layers.rule import Rule as Rule

RULES: tuple[Rule, ...] = (
    *_linear.RULES,
    *_convolution.RULES,
    *_embedding.RULES,
    *_norm.RULES,
    *_elementwise.RULES,
    *_experts.RULES,
)


def find_rule(module: nn.Module, rules: Sequence[Rule] = RULES) -> Rule | None:
    """The rule of the nearest class in the module's hierarchy, or None.

    >>> rule = find_rule(nn.Linear(2, 3))
    >>> rule.name if rule else None
    'Linear'
    """
    return _rule.find_rule(module, rules)
