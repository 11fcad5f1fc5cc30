"""Sources that compute: gradients from a model and data, by hooks, by `torch.func`, in forward mode, one by one."""
