"""The names of the values that the programs of a stage take and return.

A value gets from its maker to the programs that read it by its name alone. A *role* is
the name of a placeholder of the joint graph; whatever that graph computes has the name
of its node; all other names are in this table, too. The law: names are made and taken
apart in this file only.

======================== ============================ ================================
Name                     Made by                      Read by
======================== ============================ ================================
`param:NAME`             the stage's module           all functions of the stage
`buffer:NAME`            the module, then forwards    all functions of the stage
`const:KEY`              the trace: what it captured  all functions of the stage
`input:INDEX`            the schedule, other stages   forward, inference, backwards
`tangent:INDEX`          the loss, later stages       backwards
`tangent:INDEX@STAGE`    one of several users of an   backwards, which add these up to
                         output, each for itself      `tangent:INDEX`
`sum:ROLE`               the start of a step's sums,  backwards, the end of the step
                         then backwards
`new_sum:ROLE`           backwards, the reduction of  the stage: its next `sum:ROLE`
                         sums per group
`grad:ROLE`              the user: `.grad` as a step  the start or the reduction of
                         begins                       sums
`grad:input:INDEX`       backwards, for an input of   the stage that made the input
                         another stage
`whole:ROLE`             the gathering of a weight,   the stage: its `param:NAME` for
                         once a step                  that step
`part:NAME@STAGE`        each stage that has a tied   the sum over these stages
                         parameter
`total:NAME`             that sum                     the stage: its next `sum:ROLE`
`chunk:BUCKET@REPLICA`   the split of gradients, for  the transport: the replica's
                         a replica to average         `part:BUCKET@...`
`part:BUCKET@REPLICA`    the split of that replica    the mean of a chunk
`mean:BUCKET@REPLICA`    the mean of its chunk there  the join of gradients
`route:in:STAGE`         the transport, per message   programs that receive
`route:out:STAGE`        the transport, per message   programs that send
`mark`                   the recorder, per action     programs that note their times
`seed`                   a call of a program          random operations
`storage:NAME`           the stage: a value `NAME`    the program that makes `NAME`,
                         that nobody reads any more   in the memory of the old one
`small:MAKER:DTYPE`      a program: small values,     backwards, in the parts that
                         see `compile.bundles`        they are made of
`flat:MAKER`             a program: large values,     backwards, which read its parts
                         see `compile.flat_values`    where they lie
`captured:SLOT`          the trace of a program:      that program
                         scalars that are built in
`token`                  programs with operations     nobody: it keeps these alive
                         that have effects
`output:INDEX`           the forward                  the schedule and the loss
`loss:NAME`              the value `NAME` of a loss,  that program
                         where forward, loss and
                         backward are one program
======================== ============================ ================================

`NAME` is that of a parameter or buffer in the stage's module.
"""

from typing import Literal, TypeAlias

import torch

MARK = "mark"
"""Name of the operand that says which action a program is part of."""

SEED = "seed"
"""Name of the operand from which a program draws random numbers."""

TOKEN = "token"
"""Name of the result that keeps a program's operations with effects."""

BucketKind: TypeAlias = Literal["chunk", "part", "mean"]

_PARAMETER, _BUFFER, _INPUT, _TANGENT = "param:", "buffer:", "input:", "tangent:"
_ROUTE = "route:"


def parameter_role(name: str) -> str:
    """Return the role of a parameter, by its first name in the module."""
    return f"{_PARAMETER}{name}"


def buffer_role(name: str) -> str:
    """Return the role of a buffer."""
    return f"{_BUFFER}{name}"


def constant_role(key: str) -> str:
    """Return the role of a tensor that the trace captured."""
    return f"const:{key}"


def input_role(index: int) -> str:
    """Return the role of a tensor input of the stage."""
    return f"{_INPUT}{index}"


def tangent(index: int) -> str:
    """Return the role of the gradient of an output."""
    return f"{_TANGENT}{index}"


def is_parameter(role: str) -> bool:
    """Return whether a role is that of a parameter."""
    return role.startswith(_PARAMETER)


def is_buffer(role: str) -> bool:
    """Return whether a role is that of a buffer."""
    return role.startswith(_BUFFER)


def is_input(role: str) -> bool:
    """Return whether a role is that of an input."""
    return role.startswith(_INPUT)


def is_tangent(role: str) -> bool:
    """Return whether a role is that of the gradient of an output."""
    return role.startswith(_TANGENT)


def name_in_module(role: str) -> str:
    """Return the name that a parameter or buffer has in the stage's module."""
    return role.removeprefix(_PARAMETER if is_parameter(role) else _BUFFER)


def index_of_input(role: str) -> int:
    """Return which input a role is that of."""
    return int(role.removeprefix(_INPUT))


def index_of_tangent(role: str) -> int:
    """Return of which output a role is the gradient."""
    return int(role.removeprefix(_TANGENT))


def tangent_part(index: int, stage: int) -> str:
    """Return the name of what one of several stages adds to an output's gradient."""
    return f"{tangent(index)}@{stage}"


def output_name(index: int) -> str:
    """Return the name under which an output of the stage is kept."""
    return f"output:{index}"


def of_loss(name: str) -> str:
    """Return the name that a value of a loss has among those of a stage."""
    return f"loss:{name}"


def accumulator(role: str) -> str:
    """Return the name under which the gradient so far of a parameter is passed."""
    return f"sum:{role}"


def accumulated(role: str) -> str:
    """Return the name under which a program returns a new sum of gradients."""
    return f"new_{accumulator(role)}"


def given_grad(role: str) -> str:
    """Return the name under which the present gradient of a parameter is passed."""
    return f"grad:{role}"


def input_grad(index: int) -> str:
    """Return the name under which the gradient of an input is sent."""
    return f"grad:{input_role(index)}"


def copied(role: str) -> str:
    """Return the name of a weight's copy, sharded as programs use it."""
    return f"whole:{role}"


def shared_part(name: str, stage: int) -> str:
    """Return the name of a stage's gradient of a parameter that others have, too."""
    return f"part:{name}@{stage}"


def shared_total(name: str) -> str:
    """Return the name of the gradient of a parameter by all stages that have it."""
    return f"total:{name}"


def bucket_name(kind: BucketKind, bucket: int, replica: int) -> str:
    """Return the name of a piece of a bucket of gradients, see `gradients.replicas`."""
    return f"{kind}:{bucket}@{replica}"


def storage_of(name: str) -> str:
    """Return the name under which a value is passed whose memory a result takes."""
    return f"storage:{name}"


def bundle_name(maker: str, dtype: torch.dtype) -> str:
    """Return the name of small values that pass as one; that of sums is a role."""
    return f"small:{maker}:{dtype}"


def flat_name(maker: str) -> str:
    """Return the name of large values that a program writes into one."""
    return f"flat:{maker}"


def captured_scalar(slot: int) -> str:
    """Return the name of a parameter of a program that is not an argument of a call."""
    return f"captured:{slot}"


def route_in(stage: int) -> str:
    """Return the name of the route of what comes from `stage`."""
    return f"{_ROUTE}in:{stage}"


def route_out(stage: int) -> str:
    """Return the name of the route of what goes to `stage`."""
    return f"{_ROUTE}out:{stage}"


def is_route(name: str) -> bool:
    """Return whether a name is that of a route."""
    return name.startswith(_ROUTE)
