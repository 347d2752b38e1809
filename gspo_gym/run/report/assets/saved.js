start(new SavedSource());
