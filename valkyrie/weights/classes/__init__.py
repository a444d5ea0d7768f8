"""Classes of models of Hugging Face, one file each: their fields, bindings and tensors."""
