"""The layouts of the matrix: name, ranks, flags. ``covering`` are those that ``make test`` runs, one of each kind at least."""

from __future__ import annotations

from dataclasses import dataclass

TP2 = ("--tensor-model-parallel-size", "2")
SP = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
PP4 = ("--pipeline-model-parallel-size", "4")
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")
CP2 = ("--context-parallel-size", "2")
CP4 = ("--context-parallel-size", "4")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SEVERAL = ("--max-tokens-per-gpu", "70")
"""Many micro-batches; what one holds depends on the layout."""
ONE_EACH = ("--max-tokens-per-gpu", "32")
"""No packing: every sequence a micro-batch of its own."""


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    flags: tuple[str, ...] = ()
    covering: bool = False


DENSE = [
    Layout("one rank", 1, covering=True),
    Layout("one rank, many micro-batches", 1, SEVERAL),
    Layout("one rank, no packing", 1, ONE_EACH, covering=True),
    Layout("recompute", 1, (*RECOMPUTE, *SEVERAL), covering=True),
    Layout("recompute selective", 1, ("--recompute-granularity", "selective", *SEVERAL)),
    Layout("dp2", 2, covering=True),
    Layout("dp2, many micro-batches", 2, SEVERAL),
    Layout("dp2, no distributed optimizer", 2, ("--no-use-distributed-optimizer", *SEVERAL), covering=True),
    Layout("dp2, overlap", 2, (*OVERLAP, *SEVERAL), covering=True),
    Layout("dp4", 4),
    Layout("tp2", 2, TP2),
    Layout("tp2 sp", 2, (*SP, *SEVERAL), covering=True),
    Layout("pp2", 2, PP2),
    Layout("pp2, many micro-batches", 2, (*PP2, *SEVERAL), covering=True),
    Layout("pp2 vpp2", 2, (*VPP2, *SEVERAL), covering=True),
    Layout("pp4", 4, (*PP4, *SEVERAL)),
    Layout("cp2", 2, CP2),
    Layout("cp2, many micro-batches", 2, (*CP2, *SEVERAL), covering=True),
    Layout("cp2, no packing", 2, (*CP2, "--max-tokens-per-gpu", "16")),
    Layout("cp4", 4, CP4, covering=True),
    Layout("tp2 dp2", 4, (*TP2, *SEVERAL)),
    Layout("tp2 sp dp2, overlap", 4, (*SP, *OVERLAP, *SEVERAL)),
    Layout("tp2 pp2", 4, (*TP2, *PP2)),
    Layout("tp2 sp pp2", 4, (*SP, *PP2, *SEVERAL)),
    Layout("tp2 sp pp2 vpp2", 4, (*SP, *VPP2, *SEVERAL)),
    Layout("tp2 cp2", 4, (*TP2, *CP2)),
    Layout("tp2 sp cp2", 4, (*SP, *CP2, *SEVERAL), covering=True),
    Layout("pp2 cp2", 4, (*PP2, *CP2, *SEVERAL)),
    Layout("pp2 vpp2 cp2", 4, (*VPP2, *CP2, *SEVERAL)),
    Layout("pp2 dp2", 4, (*PP2, *SEVERAL)),
    Layout("cp2 dp2", 4, (*CP2, *SEVERAL), covering=True),
    Layout("cp2 dp2, no distributed optimizer", 4, (*CP2, "--no-use-distributed-optimizer")),
    Layout("tp2 sp pp2 cp2", 8, (*SP, *PP2, *CP2, *SEVERAL), covering=True),
    Layout("tp2 sp pp2 dp2", 8, (*SP, *PP2, *SEVERAL)),
    Layout("tp2 sp cp2 dp2", 8, (*SP, *CP2, *SEVERAL)),
    Layout("pp2 cp2 dp2, overlap", 8, (*PP2, *CP2, *OVERLAP, *SEVERAL)),
]

TIED = [
    Layout("one rank", 1),
    Layout("tp2 sp", 2, (*SP, *SEVERAL)),
    Layout("pp2", 2, (*PP2, *SEVERAL), covering=True),
    Layout("tp2 sp pp2 vpp2", 4, (*SP, *VPP2, *SEVERAL)),
]

EP2 = ("--expert-model-parallel-size", "2")
ETP1 = ("--expert-tensor-parallel-size", "1")
ETP2 = ("--expert-tensor-parallel-size", "2")

EXPERTS = [
    Layout("one rank", 1, covering=True),
    Layout("one rank, many micro-batches", 1, SEVERAL),
    Layout("dp2", 2, SEVERAL),
    Layout("ep2", 2, (*EP2, *SEVERAL), covering=True),
    Layout("ep2, no distributed optimizer", 2, (*EP2, "--no-use-distributed-optimizer")),
    Layout("ep2 cp2", 2, (*EP2, *CP2, *SEVERAL)),
    Layout("ep2 tp2 sp etp1", 2, (*EP2, *SP, *ETP1, *SEVERAL), covering=True),
    Layout("ep2 tp2 sp etp2", 4, (*EP2, *SP, *ETP2, *SEVERAL)),
    Layout("ep2 pp2", 4, (*EP2, *PP2, *SEVERAL)),
    Layout("ep2 tp2 sp pp2 etp1", 4, (*EP2, *SP, *PP2, *ETP1, *SEVERAL)),
    Layout("ep2 tp2 sp cp2 dp2 etp1, overlap", 8, (*EP2, *SP, *CP2, *ETP1, *OVERLAP, *SEVERAL)),
]
"""A mixture of experts; its auxiliary loss is a property of micro-batches, so each layout has its own reference."""
