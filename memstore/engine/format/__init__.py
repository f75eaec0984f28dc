"""The meaning of a store's bytes: records, segment headers, and where tensors lie. Pure: no file is touched here."""
