"""What memstore has to do with the formats and libraries of others: one outside interface each.

attach               files of others as entries: which format a path has, and what all formats have in common
safetensors_files    safetensors, and Hugging Face's checkpoints of several
memmap               folders that TensorDict.memmap writes; memmap_export: those that load_memmap reads
torch_files          files that torch.save writes
npy                  numpy's
export, output       values as files of these formats, each of which appears whole or not at all
"""
