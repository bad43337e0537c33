"""Manifest of the cutedsl backend. Data only: no kernel is imported here."""

from gdn.capabilities import BackendManifest
from gdn.hookspecs import hookimpl

MANIFEST = BackendManifest(name="cutedsl", summary="CuTe DSL kernels for NVIDIA GPUs", capabilities=())


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
