"""Programs of a rank for whole models, with DDP's buckets and `int4_group`: nothing is run."""

from __future__ import annotations

from casync.building.parts import Choice, Tensor
from casync.codec import FLOAT_BYTES
from casync.graph.graph import build_program
from casync.graph.plan import partition
from casync.graph.shares import share_out
from casync.raw import with_raw
from casync.topology import Topology
from hipress.choose.workload import ddp_buckets
from hipress.codecs import compile_codec, partitions

CODEC = "int4_group"
CODECS = with_raw({CODEC: compile_codec(CODEC, {})})


def bert_large():
    """The parameters' numbers of elements, in order."""
    block = [1024 * 1024, 1024] * 4 + [1024] * 2 + [1024 * 4096, 4096, 4096 * 1024] + [1024] * 3
    return [30522 * 1024, 512 * 1024, 2048, 1024, 1024, *(block * 24), 1024 * 1024, 1024]


def gpt2(layers=12, width=768):
    """Numbers of elements of GPT-2 small; of xl with 48 layers of 1600."""
    square, few = width * width, width
    block = [few, few, 3 * square, 3 * few, square, few, few, few]
    block += [4 * square, 4 * few, 4 * square, few]
    return [50257 * width, 1024 * width, *(block * layers), few, few]


def buckets(sizes):
    """Indices of parameters by bucket, as in DDP's buckets after the first step."""
    for positions in ddp_buckets([FLOAT_BYTES * size for size in reversed(sizes)]):
        yield [len(sizes) - 1 - position for position in positions]


def programs_of(sizes, ranks):
    """The programs of a step of a model by `ps`, of a rank in the middle."""
    topology = Topology.flat(ranks)
    shares = {str(i): each for i, each in enumerate(share_out(sizes, ranks))}
    programs = []
    for bucket in buckets(sizes):
        starts = [sum(sizes[i] for i in bucket[:k]) for k in range(len(bucket))]
        tensors = [Tensor(str(i), i, at, sizes[i], 0) for i, at in zip(bucket, starts, strict=True)]
        cuts = {i: partitions(sizes[i], CODECS[CODEC], "ps", ranks) for i in bucket}
        choices = {str(i): Choice(CODEC, "ps", cut) for i, cut in cuts.items()}
        parts = partition(tensors, choices, topology, CODECS, shares=shares)
        rank = (ranks // 2 + 1) % ranks
        programs.append(build_program(parts, topology, CODECS, rank, rotates=False))
    return programs
