"""Our environments served to other trainers: task apps and OpenEnv."""
