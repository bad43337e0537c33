"""Manifest of the triton backend. Data only: no kernel is imported here."""

from gdn.capabilities import BackendManifest
from gdn.hookspecs import hookimpl

MANIFEST = BackendManifest(name="triton", summary="Triton kernels for NVIDIA and AMD GPUs", capabilities=())


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
