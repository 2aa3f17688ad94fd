"""Parts that commands of several folders share: options of the same name, all that is printed, completion of names."""
