"""Tasks. The import of a module registers them; `seqio_tasks.publish` tells seqio."""
