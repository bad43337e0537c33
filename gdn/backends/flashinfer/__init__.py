"""Manifest of the flashinfer backend. Data only: no kernel is imported here."""

from gdn.capabilities import BackendManifest
from gdn.hookspecs import hookimpl

MANIFEST = BackendManifest(name="flashinfer", summary="FlashInfer's Gated DeltaNet kernels", capabilities=())


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
