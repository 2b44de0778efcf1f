# An overlay port: builds the library from the repository that it is in, with the cargo of the machine.
#
#     vcpkg install pagedllm --overlay-ports=packaging/vcpkg/ports
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

# Rust builds an optimized library only.
set(VCPKG_POLICY_MISMATCHED_NUMBER_OF_BINARIES enabled)

find_program(CARGO cargo PATHS "$ENV{HOME}/.cargo/bin" REQUIRED)
find_program(BASH bash REQUIRED)
set(built "${CURRENT_BUILDTREES_DIR}/cargo")
vcpkg_execute_required_process(
    COMMAND "${CARGO}" build --release --locked --lib --target-dir "${built}"
    WORKING_DIRECTORY "${SOURCE_PATH}"
    LOGNAME "cargo-${TARGET_TRIPLET}")

set(tree "${CURRENT_BUILDTREES_DIR}/tree")
file(REMOVE_RECURSE "${tree}")
vcpkg_execute_required_process(
    COMMAND "${CMAKE_COMMAND}" -E env "BUILT=${built}/release" "${BASH}" scripts/install.sh "${tree}"
    WORKING_DIRECTORY "${SOURCE_PATH}"
    LOGNAME "install-${TARGET_TRIPLET}")

# One of the two libraries, as the triplet has it. pagedllm::pagedllm is the one that is there.
file(INSTALL "${tree}/include/" DESTINATION "${CURRENT_PACKAGES_DIR}/include")
if(VCPKG_LIBRARY_LINKAGE STREQUAL "static")
    file(INSTALL "${tree}/lib/libpagedllm.a" DESTINATION "${CURRENT_PACKAGES_DIR}/lib")
else()
    file(GLOB libraries "${tree}/lib/libpagedllm.so*")
    file(INSTALL ${libraries} DESTINATION "${CURRENT_PACKAGES_DIR}/lib")
endif()
file(INSTALL "${tree}/lib/pkgconfig/" DESTINATION "${CURRENT_PACKAGES_DIR}/lib/pkgconfig")
if(VCPKG_LIBRARY_LINKAGE STREQUAL "static")
    # The static library needs what is private to the shared one.
    file(READ "${CURRENT_PACKAGES_DIR}/lib/pkgconfig/pagedllm.pc" text)
    string(REGEX REPLACE "\nLibs: ([^\n]*)\nLibs.private: ([^\n]*)" "\nLibs: \\1 \\2" text "${text}")
    file(WRITE "${CURRENT_PACKAGES_DIR}/lib/pkgconfig/pagedllm.pc" "${text}")
endif()
vcpkg_fixup_pkgconfig()

# The files for CMake are in share/ here, one folder less deep.
foreach(name pagedllmConfig.cmake pagedllmConfigVersion.cmake)
    file(READ "${tree}/lib/cmake/pagedllm/${name}" text)
    string(REPLACE "{CMAKE_CURRENT_LIST_DIR}/../../.." "{CMAKE_CURRENT_LIST_DIR}/../.." text "${text}")
    if(name STREQUAL "pagedllmConfig.cmake" AND VCPKG_LIBRARY_LINKAGE STREQUAL "static")
        string(REGEX REPLACE "  add_library\\(pagedllm::pagedllm SHARED.*(  add_library\\(pagedllm::static )" "\\1" text "${text}")
        string(REPLACE "pagedllm::static" "pagedllm::pagedllm" text "${text}")
    elseif(name STREQUAL "pagedllmConfig.cmake")
        string(REGEX REPLACE "\n  add_library\\(pagedllm::static .*endif\\(\\)" "endif()" text "${text}")
    endif()
    file(WRITE "${CURRENT_PACKAGES_DIR}/share/pagedllm/${name}" "${text}")
endforeach()

file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/pagedllm")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE" "${tree}/share/doc/pagedllm/licences-of-dependencies.txt")
