# Runs the portfile without vcpkg: the variables and functions of vcpkg that it uses are here. It is no
# proof that vcpkg accepts the port.
#
#     cmake -DPORT_DIR= -DBUILT= -DLINKAGE=static|dynamic -DOUT= -P run.cmake
cmake_minimum_required(VERSION 3.18)
set(CURRENT_BUILDTREES_DIR "${OUT}/buildtrees")
set(CURRENT_PACKAGES_DIR "${OUT}/packages")
set(TARGET_TRIPLET x64-linux)
set(VCPKG_LIBRARY_LINKAGE "${LINKAGE}")
file(MAKE_DIRECTORY "${CURRENT_BUILDTREES_DIR}")

# Cargo has built the library before.
function(vcpkg_execute_required_process)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "WORKING_DIRECTORY;LOGNAME" "COMMAND")
    if(arg_UNPARSED_ARGUMENTS OR NOT arg_WORKING_DIRECTORY OR NOT arg_LOGNAME)
        message(FATAL_ERROR "wrong arguments: ${ARGV}")
    endif()
    list(GET arg_COMMAND 0 program)
    if(program MATCHES "/cargo$")
        list(JOIN arg_COMMAND " " line)
        if(NOT line MATCHES " build --release --locked --lib --target-dir ${CURRENT_BUILDTREES_DIR}/cargo$")
            message(FATAL_ERROR "wrong call of cargo: ${line}")
        endif()
        file(MAKE_DIRECTORY "${CURRENT_BUILDTREES_DIR}/cargo")
        file(CREATE_LINK "${BUILT}" "${CURRENT_BUILDTREES_DIR}/cargo/release" SYMBOLIC)
    else()
        execute_process(COMMAND ${arg_COMMAND} WORKING_DIRECTORY "${arg_WORKING_DIRECTORY}" OUTPUT_QUIET ERROR_QUIET COMMAND_ERROR_IS_FATAL ANY)
    endif()
endfunction()

function(vcpkg_fixup_pkgconfig)
    if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/lib/pkgconfig/pagedllm.pc")
        message(FATAL_ERROR "no file for pkg-config")
    endif()
endfunction()

function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "COMMENT" "FILE_LIST")
    foreach(file ${arg_FILE_LIST})
        file(READ "${file}" text)
        file(APPEND "${CURRENT_PACKAGES_DIR}/share/pagedllm/copyright" "${text}")
    endforeach()
endfunction()

include("${PORT_DIR}/portfile.cmake")
