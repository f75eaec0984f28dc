"""The index of a host: an LMDB database and its tables. The only importer of lmdb."""
