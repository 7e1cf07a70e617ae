"""Bundles of Ray's placement group for a plan: one for each planned node, with all its devices.

Ray keeps a bundle on one of its nodes, so that tensor parallel stays inside a node and rank r is where the plan has it.
Two planned nodes may share a Ray node that is large enough for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import ANY_CLASS, Cluster

CLASS_SHARE = 0.001
"""Amount of a class's resource that a bundle takes: it chooses nodes and limits nothing."""
ACCELERATOR = "accelerator_type:"
"""Beginning of the resource that Ray gives to nodes with a known kind of GPU."""
OWN = "flexrlhf_"
"""Beginning of a resource with which a user marks the nodes of a device class."""


Bundle = Mapping[str, float]
"""Resources of one planned node, by their names in Ray."""


def node_bundles(cluster: Cluster, device: str, offered: Collection[str]) -> tuple[Bundle, ...]:
    """Return the bundle of each node of ``cluster``: a CPU and, with CUDA, a GPU for each of its devices.

    device:   ``cpu`` or ``cuda``, of all ranks
    offered:  names of the resources of the Ray cluster

    Raises UserError if Ray cannot distinguish the device classes of the plan.
    """
    resources = class_resources(cluster.classes, device, offered)
    bundles = []
    for node in range(cluster.num_nodes):
        ranks = cluster.ranks_on_node(node)
        bundle = dict.fromkeys(("GPU", "CPU") if device == "cuda" else ("CPU",), float(len(ranks)))
        classes = (resources.get(cluster.devices[rank].device_class) for rank in ranks)
        bundles.append(bundle | {name: CLASS_SHARE for name in classes if name is not None})
    return tuple(bundles)


def class_resources(classes: Sequence[str], device: str, offered: Collection[str]) -> dict[str, str]:
    """Return the resource by which Ray finds the nodes of each class. One class needs none.

    Raises UserError if several classes have none, or two the same.
    """
    found = {name: resource for name in classes if (resource := _resource_of(name, device, offered)) is not None}
    if len(classes) == 1:
        return found
    for number, name in enumerate(classes):
        if name not in found:
            raise UserError(
                f"--launcher ray: no Ray node offers a resource of the class {name}, so its devices are not "
                f"distinguished from others; start its nodes with --resources '{{\"{OWN}{name}\": 1}}'"
            )
        same = next((each for each in classes[:number] if found[each] == found[name]), None)
        if same is not None:
            raise UserError(
                f"--launcher ray: Ray has the one resource {found[name]} for the classes {same} and {name}; start "
                f"their nodes with --resources '{{\"{OWN}{same}\": 1}}' and '{{\"{OWN}{name}\": 1}}'"
            )
    return found


def _resource_of(name: str, device: str, offered: Collection[str]) -> str | None:
    """Return the resource of a class that the cluster offers: a user's own one, else Ray's for that kind of GPU."""
    if name == ANY_CLASS:
        return None
    kinds = [f"{ACCELERATOR}{name}", f"{ACCELERATOR}{name.partition('-')[0]}"] if device == "cuda" else []
    return next((each for each in (f"{OWN}{name}", *kinds) if each in offered), None)


def check_capacity(bundles: Sequence[Bundle], ray_nodes: Sequence[Bundle]) -> None:
    """Raise UserError if the Ray cluster is too small, whatever else it runs. ``ray_nodes``: resources of each."""
    for node, bundle in enumerate(bundles):
        if not any(_fits(bundle, each) for each in ray_nodes):
            raise UserError(
                f"--launcher ray: node {node} of the plan needs {resources_text(bundle)} on one Ray node; "
                f"Ray has {nodes_text(ray_nodes, bundle)}"
            )
    need = total_of(bundles)
    if not _fits(need, total_of(ray_nodes)):
        raise UserError(f"--launcher ray: the plan needs {resources_text(need)}; Ray has {nodes_text(ray_nodes, need)}")


def total_of(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Return the resources of all bundles together."""
    names = dict.fromkeys(name for each in bundles for name in each)
    return {name: sum(each.get(name, 0.0) for each in bundles) for name in names}


def nodes_text(ray_nodes: Sequence[Bundle], names: Collection[str]) -> str:
    """Return the amounts that Ray nodes have of the resources ``names``."""
    kinds = [resources_text({name: node.get(name, 0) for name in names}) for node in ray_nodes]
    counts = {kind: kinds.count(kind) for kind in kinds}
    listed = "; ".join(f"{count} with {kind}" for kind, count in counts.items())
    return f"{len(kinds)} node{'' if len(kinds) == 1 else 's'}{': ' if listed else ''}{listed}"


def resources_text(resources: Bundle) -> str:
    """Return resources as ``2 CPU, flexrlhf_big``; a class's is named without its share."""
    shown = [f"{value:g} {name}" for name, value in resources.items() if not _is_class(name)]
    return ", ".join([*shown, *(name for name, value in resources.items() if _is_class(name) and value)])


def _is_class(name: str) -> bool:
    return name.startswith((OWN, ACCELERATOR))


def _fits(need: Bundle, available: Bundle) -> bool:
    return all(available.get(name, 0.0) >= value for name, value in need.items())
