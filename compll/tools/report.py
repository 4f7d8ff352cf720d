"""The report of a compiled spec, as data and as Markdown: payload, passes, memory traffic."""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.places import places
from compll.runtime.codec import Codec
from compll.tools import explain
from compll.tools.artifacts import Kernels
from compll.tools.explain import SIZES


def facts(codec: Codec, target: str) -> dict[str, object]:
    """The report that `compll build` writes beside the source, as JSON."""
    module = codec.module
    found = explain.encode_traffic(module)
    return {
        "name": codec.name,
        "about": module.about,
        "source": module.source,
        "parameters": dict(codec.params),
        "digest": codec.digest,
        "target": target,
        "group": module.group or None,
        "feedback": module.feedback,
        "states": [s.name for s in module.states],
        "merge": module.merge,
        "rounds": dict(module.rounds),
        "payload": [{"name": p.name, "type": p.type, "bytes": p.size} for p in places(module)],
        "payload_fixed": codec.fixed,
        "payload_bytes": {str(n): codec.payload_bytes(n) for n in SIZES},
        "passes": len(found.walks),
        "passes_least": found.chain,
        "bytes_moved_per_element": found.moved,
        "bytes_least_per_element": found.least,
    }


def markdown(codec: Codec, target: str, kernels: Mapping[str, Kernels]) -> str:
    """The report for a reader: payload, passes and their traffic, and resources of kernels compiled
    for an architecture."""
    module = codec.module
    rows = [f"| {p.name} | {p.type} | {p.size} |" for p in places(module)]
    bound = "exactly" if codec.fixed else "at most"
    sizes = [f"| {n} | {codec.payload_bytes(n)} |" for n in SIZES]
    params = ", ".join(f"{k} = {v}" for k, v in codec.params.items()) or "none"
    facts = [f"- parameters: {params}", f"- backend: {target}", f"- digest: {codec.digest}"]
    parts = [
        [f"# {codec.name}", "", module.about, "", *facts],
        ["## Payload", "", "| part | type | bytes |", "| --- | --- | --- |", *rows],
        [f"| elements | bytes ({bound}) |", "| --- | --- |", *sizes],
        ["## Passes", "", "```", *explain.passes(module), "```"],
        ["## Memory traffic", "", "Bytes per element of the gradient.", "", "```"],
    ]
    text = "\n\n".join("\n".join(part) for part in parts)
    resources = [line for arch, found in kernels.items() for line in kernel_table(arch, found)]
    return "\n".join([text, *explain.walks(module), "```", *resources, ""])


def kernel_table(arch: str, kernels: Kernels) -> list[str]:
    """Registers and memory of kernels for an architecture and float32 gradients, as Markdown."""
    rows = [
        f"| {name} | {used['registers']} | {used['local']} | {used['shared']} |"
        for name, used in kernels["float32"].items()
    ]
    head = "| kernel | registers | local bytes of a thread | shared bytes of a block |"
    return ["", f"## Kernels on {arch}", "", head, "| --- | --- | --- | --- |", *rows]


def bits(codec: Codec) -> float:
    """Payload bits per element of a large tensor."""
    n = 1 << 24
    return codec.payload_bytes(n) * 8 / n
