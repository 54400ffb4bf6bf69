"""The accelerator that a backend uses."""


def accelerator(backend):
    """Name of the accelerator that the backend uses, `None` without one."""
    if backend == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if backend == "jax":
        import jax

        device = jax.devices()[0]
        return None if device.platform == "cpu" else device.device_kind
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return None
    return tf.config.experimental.get_device_details(devices[0])["device_name"]
