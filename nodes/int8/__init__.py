"""From a checkpoint or a MODEL to an INT8 MODEL: files, formats, policy, quantising, loading, host backend."""
