"""Files on disk: written aside and renamed, JSON and safetensors, never pickle; shards of tensors; users' own files."""
