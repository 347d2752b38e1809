"""How right is credit: true advantages of turns by forked episodes, and the estimators of them, scored."""
