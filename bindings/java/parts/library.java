    // ---- library --------------------------------------------------------------------------------

    // The functions of C.
    private static final class Native {
        // generated: constants_lines

        private static final SymbolLookup LIBRARY = load();

        // generated: functions

        // Finds the library by the property pagedllm.library, the environment variable PAGEDLLM_LIBRARY, or
        // as the dynamic linker does.
        private static SymbolLookup load() {
            String named = System.getProperty("pagedllm.library", System.getenv("PAGEDLLM_LIBRARY"));
            String path = named == null || named.isEmpty() ? "libpagedllm.so." + EXPECTED_ABI : named;
            SymbolLookup library;
            try {
                library = SymbolLookup.libraryLookup(path, Arena.global());
            } catch (IllegalArgumentException error) {
                throw new UnsatisfiedLinkError(path + " cannot be loaded; install the package for this machine, or set PAGEDLLM_LIBRARY to "
                        + "the path of the library");
            }
            int version = (int) number(library, "pllm_abi_version", path);
            if (version != EXPECTED_ABI) {
                throw new UnsatisfiedLinkError(path + " has ABI version " + version + " (this file: " + EXPECTED_ABI
                        + "); use the file and the library of one release");
            }
            return library;
        }

        private static int number(SymbolLookup library, String name, String path) {
            MemorySegment function = library.find(name)
                    .orElseThrow(() -> new UnsatisfiedLinkError(path + " has no " + name + "; set PAGEDLLM_LIBRARY to the path of the library"));
            try {
                return (int) Linker.nativeLinker().downcallHandle(function, FunctionDescriptor.of(JAVA_INT)).invokeExact();
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static MethodHandle find(String name, FunctionDescriptor descriptor) {
            MemorySegment function = LIBRARY.find(name).orElseThrow(() -> new UnsatisfiedLinkError(
                    "the library has no " + name + "; use the file and the library of one release"));
            return Linker.nativeLinker().downcallHandle(function, descriptor);
        }

        // Returns a text of the library that ends with NUL.
        static String string(MemorySegment text) {
            return text.reinterpret(Long.MAX_VALUE).getString(0);
        }

        // A call of C throws nothing.
        private static AssertionError unexpected(Throwable thrown) {
            return new AssertionError(thrown);
        }
    }
}
