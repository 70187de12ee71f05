"""Files on disk: atomic writes of JSON and safetensors (never pickle), shards of tensors, files that users bring."""
