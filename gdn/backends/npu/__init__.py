"""Manifest of the npu backend. Data only: no kernel is imported here."""

from gdn.capabilities import BackendManifest
from gdn.hookspecs import hookimpl

MANIFEST = BackendManifest(name="npu", summary="Ascend NPUs", capabilities=())


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
