"""From the checked arguments of an op to the implementation that runs it."""

from types import ModuleType

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.recurrent import reference
from pallas_kernels.recurrent.arguments import Fold, Form, Pass, StateUpdate
from pallas_kernels.recurrent.rule import Rule

Kernels = dict[Form, ModuleType]  # modules with the `update` and `fold_history` of a form


def update(
    op: str, rule: Rule, call: Pass, kernels: Kernels, implementation: Implementation | None, interpret: bool
) -> StateUpdate:
    """Runs a pass."""
    choice = dispatch.resolve(op, implementation, interpret)
    if call.inputs.values.size == 0 or call.state.size == 0:
        return StateUpdate(call.inputs.values, call.state, call.snapshots, call.ring)
    if choice.implementation == "triton":
        return kernels[call.form].update(rule, call, interpret=interpret)
    return reference.update(rule, call)


def fold_history(
    op: str, rule: Rule, call: Fold, kernels: Kernels, implementation: Implementation | None, interpret: bool
) -> jax.Array:
    """Runs a fold."""
    choice = dispatch.resolve(op, implementation, interpret)
    if call.slots.size == 0 or call.state.size == 0:
        return call.state
    if choice.implementation == "triton":
        return kernels[call.form].fold_history(rule, call, interpret=interpret)
    return reference.fold_history(rule, call)
