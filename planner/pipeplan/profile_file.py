"""Reads profile files, which docs/file-formats.md describes."""

from __future__ import annotations

from pipeplan.files import Node
from pipeplan.profile_data import Layer, Profile, Provenance, Size, Tensor


def parse(root: Node) -> Profile:
    """The profile in a document; an `InputError` names the place of what is wrong with it."""
    model, optimizer = root["model"], root["optimizer"]
    granularity, peak, sizes = model.get("granularity"), root.get("peak_bytes"), root.get("sizes")
    whole_forward_s, whole_backward_s = _whole(root)
    return Profile(
        layers=tuple(_layer(node) for node in root["layers"].items()),
        tensors=tuple(_tensor(node) for node in root["tensors"].items()),
        minibatch=root["minibatch"].integer(minimum=1),
        model_ref=model["ref"].text(),
        model_name=model["name"].text(),
        graph_hash=model["graph_hash"].text(),
        dynamic_batch=model["dynamic_batch"].boolean(),
        granularity=granularity.text() if granularity else "layer",
        provenance=_provenance(root["provenance"]),
        optimizer_name=optimizer["name"].text(),
        optimizer_state_ratio=optimizer["state_bytes_per_parameter_byte"].number(),
        together=tuple(tuple(name.text() for name in group.items()) for group in root["together"].items()),
        whole_forward_s=whole_forward_s,
        whole_backward_s=whole_backward_s,
        peak_bytes=peak.integer() if peak else 0,
        sizes=tuple(_size(node) for node in sizes.items()) if sizes else (),
    )


def _whole(node: Node) -> tuple[float | None, float | None]:
    whole = node.get("whole")
    return (whole["forward_s"].number(), whole["backward_s"].number()) if whole else (None, None)


def _size(node: Node) -> Size:
    whole_forward_s, whole_backward_s = _whole(node)
    return Size(
        minibatch=node["minibatch"].integer(minimum=1),
        layers=tuple(_layer(one) for one in node["layers"].items()),
        tensors=tuple(_tensor(one) for one in node["tensors"].items()),
        whole_forward_s=whole_forward_s,
        whole_backward_s=whole_backward_s,
    )


def _layer(node: Node) -> Layer:
    node = Node(node.value, f"{node.where} ({_name_of(node)})")
    update, workspace, like = node.get("update_s"), node.get("workspace_bytes"), node.get("like")
    return Layer(
        name=node["name"].text(),
        module=node["module"].text(),
        op=node["op"].text(),
        forward_s=node["forward_s"].number(),
        backward_s=node["backward_s"].number(),
        forward_spread_s=node["forward_spread_s"].number(),
        backward_spread_s=node["backward_spread_s"].number(),
        parameter_bytes=node["parameter_bytes"].integer(),
        buffer_bytes=node["buffer_bytes"].integer(),
        saved_bytes=node["saved_bytes"].integer(),
        update_s=update.number() if update else 0.0,
        workspace_bytes=workspace.integer() if workspace else 0,
        like=like.text() if like else "",
    )


def _tensor(node: Node) -> Tensor:
    node = Node(node.value, f"{node.where} ({_name_of(node)})")
    return Tensor(
        name=node["name"].text(),
        producer=node["producer"].text(),
        consumers=tuple(consumer.text() for consumer in node["consumers"].items()),
        bytes=node["bytes"].integer(),
        gradient_bytes=node["gradient_bytes"].integer(),
    )


def _name_of(node: Node) -> str:
    name = node["name"].text()
    return repr(name) if len(name) <= 60 else repr(name[:57] + "…")


def _provenance(node: Node) -> Provenance:
    traced, processes, notes = node.get("traced"), node.get("processes"), node.get("notes")
    return Provenance(
        kind=node["kind"].text(),
        device=node["device"].text(),
        device_name=node["device_name"].text(),
        when=node["when"].text(),
        how=node["how"].text(),
        torch=node["torch"].text(),
        pipeplan=node["pipeplan"].text(),
        threads=node["threads"].integer(),
        warmup=node["warmup"].integer(),
        repeats=node["repeats"].integer(),
        traced=traced.text() if traced else "",
        processes=processes.integer(minimum=1) if processes else 1,
        notes=tuple(note.text() for note in notes.items()) if notes else (),
    )
