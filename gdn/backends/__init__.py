"""The built-in backends. Each registers through the entry-point group `gdn.backends`, like any third party's."""
