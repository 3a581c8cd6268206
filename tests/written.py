"""Safetensors files with any metadata, written by the package's own writer."""

from torchtether.files import check_writable, write_made


def write_tensors(file, tensors, metadata, *, name):
    """Write ``tensors`` by name, and ``metadata`` as it is given, to the open ``file``."""
    for key, tensor in tensors.items():
        check_writable(key, tensor)
    layout = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    write_made(file, layout, tensors.items(), lambda checksums: metadata, name=name)
