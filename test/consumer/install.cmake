# cmake -DBUILD=<build folder> -DPREFIX=<folder> -DMOVED=<folder> -P install.cmake: installs to PREFIX and moves that
# to MOVED.
file(REMOVE_RECURSE ${PREFIX} ${MOVED})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX} COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${PREFIX} ${MOVED})
